"""Files of prompts answered to files, by runs that may be killed at any moment."""
