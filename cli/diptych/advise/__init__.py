"""`diptych advise`: how many pods of which kind a service should have."""
