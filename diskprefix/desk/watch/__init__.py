"""The views for people: the dashboard, `diskprefix dashboard`, `inspect` and `top`."""

PLACE = 6
COMMANDS = {
    "inspect": "inspect.inspect_command:inspect",
    "dashboard": "dashboard.dashboard_command:dashboard",
    "top": "top:top",
}
ROUTES = ("dashboard.dashboard_routes",)
PAGES = {"/": "dashboard.dashboard_page:DASHBOARD_PAGE"}
