"""Transformers for a program that prints figures: without its own messages, on one thread."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import torch


def is_there():
    """Whether transformers is installed; if so, it is made quiet, else a line says that the program does not run."""
    if importlib.util.find_spec("transformers") is None:
        print("not run: transformers is missing, with which this compares; pip install 'raypar[transformers]'")
        return False
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("raypar").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return True
