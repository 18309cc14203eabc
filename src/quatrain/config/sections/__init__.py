"""The sections of the configuration, one file each."""
