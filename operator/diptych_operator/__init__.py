"""The InferenceService: its types, its CRD, and the pure rendering into Kubernetes objects."""
