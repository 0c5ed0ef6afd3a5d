"""What looking on costs: a scrape, a viewer, and how fast a browser draws all experts."""
