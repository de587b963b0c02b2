"""The routing proxy: an EngineClient over a prefill and a decode pool, and its policy."""
