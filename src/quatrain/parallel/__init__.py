"""Device meshes, shardings, collectives, and how programs are compiled."""
