"""`export` and `import`."""
