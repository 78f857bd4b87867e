"""What is measured and how: time, FLOPs, GPU readings, communication share, provenance, calibration."""
