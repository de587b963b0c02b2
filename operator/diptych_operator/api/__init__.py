"""The types of the custom resources, what they are checked for, and the CRDs made of them."""
