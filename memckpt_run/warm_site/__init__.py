"""Put in front of the search path of a warm process, for its `sitecustomize`."""
