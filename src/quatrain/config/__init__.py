"""Every knob, typed and frozen; layers and provenance. Imports no JAX."""
