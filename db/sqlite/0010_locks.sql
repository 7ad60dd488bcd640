-- On SQLite works run one after another and need no locks: this version is Postgres's, as in ../postgres.
select 1;
