"""The ledger: tables, transactions, and the functions that read and change them, one module an object."""

from evener_orchestrator.ledger.engine import Ledger, Transaction

__all__ = ["Ledger", "Transaction"]
