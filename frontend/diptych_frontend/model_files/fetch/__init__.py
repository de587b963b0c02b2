"""Fetches models.

`python -m diptych_frontend.model_files.fetch --uri hf://ORG/REPO --cache FOLDER`.
"""
