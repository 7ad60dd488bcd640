// PgBouncer for tests, as Debian packs it (1.18), in transaction pooling and with no setting that makes it lenient: it
// refuses every parameter of a connection but those of its default, and knows nothing of prepared statements.

import { existsSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { freePort } from "../free-ports.ts";
import { PASSWORD, USER } from "./postgres.ts";
import { handOver, openDirectory, type Served, serve } from "./server.ts";

const PROGRAM = "/usr/sbin/pgbouncer";

/** Why it can't run here; null when it can. */
export function missingPgBouncer(): string | null {
  return existsSync(PROGRAM) ? null : `there is no ${PROGRAM} (apt-get install pgbouncer)`;
}

export interface PgBouncer extends AsyncDisposable {
  /** What leads to the same database through it. */
  through(databaseUrl: string): string;
  /** Ends it, with all that runs through it. */
  kill(): Promise<void>;
  /** Starts it again where it was. */
  restart(): Promise<void>;
}

/** Fewer than a gateway's own connections, so that these share them and meet another one with each transaction. */
const SERVER_CONNECTIONS = 12;

function settings(serverPort: number, port: number, users: string): string {
  return `[databases]
* = host=127.0.0.1 port=${serverPort}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = ${port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = ${users}
pool_mode = transaction
default_pool_size = ${SERVER_CONNECTIONS}
max_client_conn = 1000
`;
}

async function launch(serverPort: number, port: number): Promise<Served | null> {
  const dir = openDirectory();
  const [config, users] = [join(dir, "pgbouncer.ini"), join(dir, "users.txt")];
  writeFileSync(users, `"${USER}" "${PASSWORD}"\n`);
  writeFileSync(config, settings(serverPort, port, users));
  handOver(dir);
  return serve(dir, [PROGRAM, config], { readyWhen: "process up", signal: "TERM" });
}

const START_ATTEMPTS = 3;

/** Before the server that listens on this port of the loopback. */
export async function startPgBouncer(serverPort: number): Promise<PgBouncer> {
  for (let attempt = 1; attempt <= START_ATTEMPTS; attempt += 1) {
    const port = freePort();
    let served = await launch(serverPort, port);
    if (served === null) continue;
    const kill = async () => {
      await served?.end();
      served = null;
    };
    return {
      through: (databaseUrl) => Object.assign(new URL(databaseUrl), { port: `${port}`, search: "?prepare=false" }).href,
      kill,
      async restart() {
        await kill();
        served = await launch(serverPort, port);
        if (served === null) throw new Error("PgBouncer did not start again");
      },
      [Symbol.asyncDispose]: kill,
    };
  }
  throw new Error("PgBouncer did not start");
}
