"""Views of analysis results; nothing here reads rings or servers."""
