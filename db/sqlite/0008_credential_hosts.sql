-- The hosts that a credential's secret may go to: a JSON array, or null for any.
alter table credentials add column allowed_hosts text;
