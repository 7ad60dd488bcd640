-- What replicas count together is Postgres's: one process alone counts in memory. This version is its own, as in ../postgres.
select 1;
