"""One file per format: a header becomes a `Catalog`, by the format's own library."""
