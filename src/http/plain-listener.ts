// A plain port beside the main one, for a few short answers that need no caller.
import { StartupProblem } from "../core/startup.ts";

const IDLE_SECONDS = 10;
/** No route of such a port takes a body. */
const BODY_BYTES_MAX = 1024;

export interface PlainListenerOptions {
  readonly host: string;
  /** 0 takes a free one. */
  readonly port: number;
  /** Where the operator has set the port. */
  readonly variable: string;
  answer(request: Request): Promise<Response>;
}

/** @throws StartupProblem when the port is taken */
export function listenPlain({ host, port, variable, answer }: PlainListenerOptions): Bun.Server<undefined> {
  try {
    return Bun.serve({
      hostname: host,
      port,
      development: false,
      // Without it Bun would share the port with another process of the same user.
      reusePort: false,
      idleTimeout: IDLE_SECONDS,
      maxRequestBodySize: BODY_BYTES_MAX,
      fetch: answer,
    });
  } catch (cause) {
    throw new StartupProblem(`TOLLGATE_HOST and ${variable} must be free to listen on: ${host} port ${port}`, {
      cause,
    });
  }
}

/** A host as it stands in a URL. */
export function hostPart(host: string): string {
  return host.includes(":") ? `[${host}]` : host;
}
