"""The handlers of the routes, by collection."""
