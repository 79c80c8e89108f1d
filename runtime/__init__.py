"""What touches a device: compile, launch, emulate, measure, verify, tune, store, and the public functions."""
