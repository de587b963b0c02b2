"""Where blocks lie: their layout, staging buffers, repacking, devices."""
