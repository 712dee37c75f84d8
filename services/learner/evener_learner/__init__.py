"""The learner: trains on whole groups and publishes weights under versions of the ledger."""
