"""Commands for maintainers of the repository: generated pages, the site, checks of the family."""
