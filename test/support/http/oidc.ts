// A real OIDC server on loopback that gives JWT access tokens for client credentials, and whose keys can be
// rotated while it runs.
import { createServer, type RequestListener } from "node:http";
import type { AddressInfo } from "node:net";
import { exportJWK, generateKeyPair, type JWK } from "jose";
import Provider from "oidc-provider";

export interface OidcServer {
  readonly issuer: string;
  readonly audience: string;
  /** Requests so far, by path. */
  readonly asked: ReadonlyMap<string, number>;
  /** An access token; `claims` are added to what the server puts in by itself. */
  token(claims: Record<string, unknown>): Promise<string>;
  /** From now on the server has this key only. The private half is returned, for forgeries. */
  rotate(kid: string): Promise<JWK>;
  /** Answers everything with this status, or by itself again after null. */
  fail(status: number | null): void;
  stop(): Promise<void>;
}

const CLIENT = { client_id: "robot", client_secret: "a-secret-of-the-test" };

/** Tokens are JWTs and the client stands in the configuration, so nothing needs to be kept. */
const NOTHING_STORED = { find: async () => undefined, upsert: async () => {} };

export async function startOidc(algorithm: "ES256" | "RS256" | "EdDSA" = "ES256"): Promise<OidcServer> {
  const audience = "https://gateway.test/";
  const asked = new Map<string, number>();
  let listener: RequestListener = (_, response) => response.writeHead(503).end();
  let failure: number | null = null;
  let extra: Record<string, unknown> = {};

  const server = createServer((request, response) => {
    const path = request.url?.split("?")[0] ?? "";
    asked.set(path, (asked.get(path) ?? 0) + 1);
    if (failure === null) listener(request, response);
    else response.writeHead(failure).end();
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const issuer = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;

  async function rotate(kid: string): Promise<JWK> {
    const pair = await generateKeyPair(algorithm, { extractable: true });
    const key = { ...(await exportJWK(pair.privateKey)), kid, use: "sig", alg: algorithm };
    const provider = new Provider(issuer, {
      jwks: { keys: [key] },
      clients: [
        {
          ...CLIENT,
          grant_types: ["client_credentials"],
          redirect_uris: [],
          response_types: [],
          id_token_signed_response_alg: algorithm,
        },
      ],
      enabledJWA: {
        idTokenSigningAlgValues: [algorithm],
      },
      features: {
        devInteractions: { enabled: false },
        clientCredentials: { enabled: true },
        resourceIndicators: {
          enabled: true,
          defaultResource: () => audience,
          getResourceServerInfo: () => ({
            scope: "invocations:read_body other",
            audience,
            accessTokenFormat: "jwt",
            jwt: { sign: { alg: algorithm } },
          }),
        },
      },
      extraTokenClaims: () => extra,
      ttl: { ClientCredentials: 600 },
      adapter: () => NOTHING_STORED,
    });
    listener = provider.callback();
    return key;
  }

  await rotate("first");
  return {
    issuer,
    audience,
    asked,
    rotate,
    async token(claims) {
      extra = claims;
      const response = await fetch(`${issuer}/token`, {
        method: "POST",
        headers: { authorization: `Basic ${btoa(`${CLIENT.client_id}:${CLIENT.client_secret}`)}` },
        body: new URLSearchParams({ grant_type: "client_credentials", scope: "invocations:read_body other" }),
      });
      const answer = (await response.json()) as { access_token?: string };
      if (answer.access_token === undefined) throw new Error(`no token: ${JSON.stringify(answer)}`);
      return answer.access_token;
    },
    fail(status) {
      failure = status;
    },
    async stop() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}
