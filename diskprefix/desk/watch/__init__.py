"""The views for people: the dashboard, `diskprefix dashboard`, `inspect` and `top`."""
