"""Tools for this repository: generated pages, the bill of materials and the figures of the source tree."""
