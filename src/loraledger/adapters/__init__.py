"""Adapters on disk: what a folder holds, its digest, and the catalog of all that may be served."""

from loraledger.adapters.catalog import (
    Catalog,
    CatalogEntry,
    CatalogProblem,
    build_catalog,
)
from loraledger.adapters.digest import content_digest
from loraledger.adapters.folder import AdapterFolder, read_folder

__all__ = [
    "AdapterFolder",
    "Catalog",
    "CatalogEntry",
    "CatalogProblem",
    "build_catalog",
    "content_digest",
    "read_folder",
]
