"""Commands of those who maintain the repository: generated pages, the site, checks of the family."""
