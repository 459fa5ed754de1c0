"""State that outlives processes: one schema, one contract, SQLite for one host."""

from dsec.store.interface import (
    Change,
    EventQuery,
    KeyRow,
    ListQuery,
    NewEvent,
    NewRequest,
    RequestRow,
    Store,
    StoreError,
)
from dsec.store.sqlite import SqliteStore, open_store

__all__ = [
    "Change",
    "EventQuery",
    "KeyRow",
    "ListQuery",
    "NewEvent",
    "NewRequest",
    "RequestRow",
    "SqliteStore",
    "Store",
    "StoreError",
    "open_store",
]
