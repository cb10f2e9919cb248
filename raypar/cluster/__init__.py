"""The connection to Ray: joining a cluster, placing actors, and calling them."""

import logging
import warnings

# In a notebook Ray and tqdm ask for ipywidgets when they are imported, in red. Nothing of raypar needs them.
logging.getLogger("ray.widgets").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", "IProgress not found")
