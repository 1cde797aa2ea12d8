"""One process per pod: supervises workers, streams files, obeys HALT."""
