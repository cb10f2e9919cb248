"""Model families: each model is a list of layers with logical names, which the pipeline splits into stages."""
