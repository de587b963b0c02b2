"""The kubectl plugin: `kubectl diptych status|why|top|render`."""
