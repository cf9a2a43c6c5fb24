"""Plans for machines that are not here: what a model needs on a mesh, and which bound a decode step has."""
