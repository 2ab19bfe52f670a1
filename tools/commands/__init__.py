"""The commands, by subject. Importing a module of these adds its commands to the application."""
