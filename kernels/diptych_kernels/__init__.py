"""The operations of the model, one folder each, with their torch reference."""
