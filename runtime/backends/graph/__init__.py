"""What backends that lower a graph read off it alike: its static values, stored weights, shapes and patterns."""
