"""Adapters on disk: what a folder holds and costs, whether an engine applies it, its digest, its stored copy, and the catalog."""

from loraledger.adapters.catalog import (
    CATALOG,
    Catalog,
    CatalogEntry,
    CatalogProblem,
    build_catalog,
)
from loraledger.adapters.reading.digest import content_digest
from loraledger.adapters.reading.folder import AdapterFolder, FolderReader, read_folder
from loraledger.adapters.store.store import Store

__all__ = [
    "CATALOG",
    "AdapterFolder",
    "Catalog",
    "CatalogEntry",
    "CatalogProblem",
    "FolderReader",
    "Store",
    "build_catalog",
    "content_digest",
    "read_folder",
]
