"""The orchestrator: plans groups, keeps the ledger and serves the API; the only writer of the database."""
