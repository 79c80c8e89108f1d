"""The autotuner. Never imported on the path of a call to `flashsmith.attention`."""
