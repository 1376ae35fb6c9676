"""Bars in databases: PostgreSQL through ADBC, QuestDB through its REST interface."""
