-- Batches are SQLite's: this version is its own, as in ../sqlite.
select 1;
