"""The types of the custom resources, their validation, and the CRDs generated from them."""
