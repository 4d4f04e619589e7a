"""The controller process: the API and the dispatch to clusters."""
