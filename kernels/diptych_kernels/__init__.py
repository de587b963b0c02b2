"""The operations of the model, one folder each: a torch reference and the kernels for devices."""
