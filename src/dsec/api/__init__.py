"""Wire types and the error tree, shared by SDK, apiserver and edge."""
