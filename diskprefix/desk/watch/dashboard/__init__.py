"""The dashboard: a page at `/`, and the JSON that it and `diskprefix top` show."""
