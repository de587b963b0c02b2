"""What `diptych up` and `diptych demo` show while they run."""
