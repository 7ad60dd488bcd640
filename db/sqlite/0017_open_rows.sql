-- How rows lie in pages is Postgres's: this version is its own, as in ../postgres.
select 1;
