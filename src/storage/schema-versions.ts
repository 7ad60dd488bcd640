// The schema's versions: numbered SQL per database, embedded in the binary, and which programs may run on each.
import postgres0001 from "../../db/postgres/0001_initial.sql" with { type: "text" };
import postgres0002 from "../../db/postgres/0002_payments.sql" with { type: "text" };
import postgres0003 from "../../db/postgres/0003_policy.sql" with { type: "text" };
import postgres0004 from "../../db/postgres/0004_receipts.sql" with { type: "text" };
import postgres0005 from "../../db/postgres/0005_claims.sql" with { type: "text" };
import postgres0006 from "../../db/postgres/0006_facilitator_accounts.sql" with { type: "text" };
import postgres0007 from "../../db/postgres/0007_agent_lists.sql" with { type: "text" };
import postgres0008 from "../../db/postgres/0008_credential_hosts.sql" with { type: "text" };
import postgres0009 from "../../db/postgres/0009_shared_transactions.sql" with { type: "text" };
import postgres0010 from "../../db/postgres/0010_locks.sql" with { type: "text" };
import postgres0011 from "../../db/postgres/0011_open_invocations.sql" with { type: "text" };
import postgres0012 from "../../db/postgres/0012_periods.sql" with { type: "text" };
import postgres0013 from "../../db/postgres/0013_totals_log.sql" with { type: "text" };
import postgres0014 from "../../db/postgres/0014_body_parts.sql" with { type: "text" };
import postgres0015 from "../../db/postgres/0015_body_rows.sql" with { type: "text" };
import postgres0016 from "../../db/postgres/0016_open_batches.sql" with { type: "text" };
import postgres0017 from "../../db/postgres/0017_open_rows.sql" with { type: "text" };
import postgres0018 from "../../db/postgres/0018_key_rotation.sql" with { type: "text" };
import postgres0019 from "../../db/postgres/0019_shared_rates.sql" with { type: "text" };
import postgres0020 from "../../db/postgres/0020_shared_limits.sql" with { type: "text" };
import postgres0021 from "../../db/postgres/0021_wallet_leases.sql" with { type: "text" };
import postgres0022 from "../../db/postgres/0022_restoration.sql" with { type: "text" };
import postgres0023 from "../../db/postgres/0023_floor.sql" with { type: "text" };
import postgres0024 from "../../db/postgres/0024_gas_of_all.sql" with { type: "text" };
import sqlite0001 from "../../db/sqlite/0001_initial.sql" with { type: "text" };
import sqlite0002 from "../../db/sqlite/0002_payments.sql" with { type: "text" };
import sqlite0003 from "../../db/sqlite/0003_policy.sql" with { type: "text" };
import sqlite0004 from "../../db/sqlite/0004_receipts.sql" with { type: "text" };
import sqlite0005 from "../../db/sqlite/0005_claims.sql" with { type: "text" };
import sqlite0006 from "../../db/sqlite/0006_facilitator_accounts.sql" with { type: "text" };
import sqlite0007 from "../../db/sqlite/0007_agent_lists.sql" with { type: "text" };
import sqlite0008 from "../../db/sqlite/0008_credential_hosts.sql" with { type: "text" };
import sqlite0009 from "../../db/sqlite/0009_shared_transactions.sql" with { type: "text" };
import sqlite0010 from "../../db/sqlite/0010_locks.sql" with { type: "text" };
import sqlite0011 from "../../db/sqlite/0011_open_invocations.sql" with { type: "text" };
import sqlite0012 from "../../db/sqlite/0012_periods.sql" with { type: "text" };
import sqlite0013 from "../../db/sqlite/0013_totals_log.sql" with { type: "text" };
import sqlite0014 from "../../db/sqlite/0014_body_parts.sql" with { type: "text" };
import sqlite0015 from "../../db/sqlite/0015_body_rows.sql" with { type: "text" };
import sqlite0016 from "../../db/sqlite/0016_open_batches.sql" with { type: "text" };
import sqlite0017 from "../../db/sqlite/0017_open_rows.sql" with { type: "text" };
import sqlite0018 from "../../db/sqlite/0018_key_rotation.sql" with { type: "text" };
import sqlite0019 from "../../db/sqlite/0019_shared_rates.sql" with { type: "text" };
import sqlite0020 from "../../db/sqlite/0020_shared_limits.sql" with { type: "text" };
import sqlite0021 from "../../db/sqlite/0021_wallet_leases.sql" with { type: "text" };
import sqlite0022 from "../../db/sqlite/0022_restoration.sql" with { type: "text" };
import sqlite0023 from "../../db/sqlite/0023_floor.sql" with { type: "text" };
import sqlite0024 from "../../db/sqlite/0024_gas_of_all.sql" with { type: "text" };

interface SchemaVersion {
  readonly sqlite: string;
  readonly postgres: string;
  /**
   * The oldest program that may start and run on a database that has this version, told by the newest version that it knows
   * itself. What only expands leaves it as it is: all that such a program reads and writes is still there and means the
   * same, and no harm comes of what it does not know. What contracts raises it.
   */
  readonly floor: number;
}

/** Version n stands at index n − 1. */
export const SCHEMA_VERSIONS: readonly SchemaVersion[] = [
  { sqlite: sqlite0001, postgres: postgres0001, floor: 1 },
  { sqlite: sqlite0002, postgres: postgres0002, floor: 2 },
  { sqlite: sqlite0003, postgres: postgres0003, floor: 3 },
  { sqlite: sqlite0004, postgres: postgres0004, floor: 4 },
  { sqlite: sqlite0005, postgres: postgres0005, floor: 5 },
  { sqlite: sqlite0006, postgres: postgres0006, floor: 6 },
  { sqlite: sqlite0007, postgres: postgres0007, floor: 7 },
  { sqlite: sqlite0008, postgres: postgres0008, floor: 8 },
  { sqlite: sqlite0009, postgres: postgres0009, floor: 9 },
  { sqlite: sqlite0010, postgres: postgres0010, floor: 10 },
  { sqlite: sqlite0011, postgres: postgres0011, floor: 11 },
  { sqlite: sqlite0012, postgres: postgres0012, floor: 12 },
  { sqlite: sqlite0013, postgres: postgres0013, floor: 13 },
  { sqlite: sqlite0014, postgres: postgres0014, floor: 14 },
  { sqlite: sqlite0015, postgres: postgres0015, floor: 15 },
  { sqlite: sqlite0016, postgres: postgres0016, floor: 16 },
  { sqlite: sqlite0017, postgres: postgres0017, floor: 17 },
  { sqlite: sqlite0018, postgres: postgres0018, floor: 18 },
  // Version 18 was seen to start, serve and stop on 21, beside a newer one and alone.
  { sqlite: sqlite0019, postgres: postgres0019, floor: 18 },
  { sqlite: sqlite0020, postgres: postgres0020, floor: 18 },
  { sqlite: sqlite0021, postgres: postgres0021, floor: 18 },
  // One that knows nothing of a restore would take what the database has forgotten for new.
  { sqlite: sqlite0022, postgres: postgres0022, floor: 22 },
  { sqlite: sqlite0023, postgres: postgres0023, floor: 22 },
  { sqlite: sqlite0024, postgres: postgres0024, floor: 22 },
];

/** What this program brings a schema to. */
export const NEWEST_VERSION = SCHEMA_VERSIONS.length;
