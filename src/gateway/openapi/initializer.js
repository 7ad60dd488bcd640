// Starts Swagger UI in the reader's browser, with what it lacks: it remembers the IDs of what was made and fills them into the
// operations that are tried next, it is dark where the system is, it shows lines of JSON as text, and it can be used by the
// keyboard and with a screen reader.

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => document.documentElement.classList.toggle("dark-mode", systemIsDark.matches);
followSystem();
systemIsDark.addEventListener("change", followSystem);

const operationsOf = (system) =>
  Object.entries(system.specSelectors.specJson().toJS().paths ?? {}).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  );

/**
 * The page calls only the gateway that it came from, so endpoints of other servers are shown but can't be tried. Neither can a
 * stream of events that never ends: the page would wait for its end.
 */
const isTryable = (state, path, method) => {
  const operation = state.getIn(["json", "paths", path, method]);
  const types = operation?.getIn(["responses", "200", "content"])?.keySeq().toArray() ?? [];
  const servers = operation?.get("servers");
  const isHere = servers === undefined || servers.some((server) => server.get("url") === "/");
  return isHere && !types.includes("text/event-stream");
};

/** What deletes comes last, so that whoever tries one operation after the other keeps what the later ones need. */
const deletionsLast = (tagged) => {
  const isDeletion = (operation) => operation.getIn(["operation", "operationId"])?.startsWith("delete") ?? false;
  const all = tagged.toList().flatMap((section) => section.get("operations"));
  const deletions = all.filter(isDeletion);
  if (deletions.isEmpty()) return tagged;
  const details = tagged.first().get("tagDetails");
  const last = tagged
    .first()
    .set("tagDetails", details.merge({ name: CLEAN_UP, description: "Delete what was made above." }))
    .set("operations", deletions);
  return tagged
    .map((section) => section.update("operations", (list) => list.filterNot(isDeletion)))
    .set(CLEAN_UP, last);
};
const CLEAN_UP = "Clean up";

const ID = /\b(agt|cred|inv)_(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b/g;
const SESSION_HEADER = "Mcp-Session-Id";

/** The newest IDs by their prefix, the newest first; and the agent that each invocation is of. */
const remembered = { agt: [], cred: [], inv: [] };
const agentOf = new Map();
/** The IDs of the examples, which are nobody's. */
const exampleIds = new Set();
/** What each operation's body was before IDs were filled in, and after. */
const filledBodies = new Map();

const prefixOf = (id) => id.split("_")[0];

const remember = (id) => {
  if (id.match(ID)?.[0] !== id) return;
  const ids = remembered[prefixOf(id)];
  ids.splice(0, ids.length, id, ...ids.filter((other) => other !== id));
};

const forget = (id) => {
  for (const ids of Object.values(remembered)) ids.splice(0, ids.length, ...ids.filter((other) => other !== id));
};

/**
 * Learns from a response of this gateway. A list fills only what is not known yet. The body of a streamed call is the agent's,
 * which must not choose what the reader deletes next, so only the gateway's header counts there.
 */
const learn = ({ url, status, headers, body: received }, method, path) => {
  const [called] = url.match(ID) ?? [];
  const body = path.endsWith("/stream") ? null : received;
  if (method === "delete" && status === 204) return forget(called);
  const made = [body?.id, body?.invocation_id, headers["x-service-invocation-id"]];
  const agent = path.startsWith("/v1/proxy/") ? called : body?.agent_id;
  for (const id of made) learnId(id, agent);
  const { id, agent_id } = [body?.data, body?.credentials].find(Array.isArray)?.[0] ?? {};
  if (typeof id === "string" && newest(prefixOf(id)) === undefined) learnId(id, agent_id);
};

const learnId = (id, agent) => {
  if (typeof id !== "string") return;
  if (agent !== undefined && prefixOf(id) === "inv") agentOf.set(id, agent);
  remember(id);
};

const newest = (prefix) => remembered[prefix]?.[0];

/** The ID for a parameter, by the prefix in its pattern. An operation on an invocation needs the agent of that invocation. */
const idFor = ({ schema }, parameters) => {
  const prefix = /^\^([a-z]+)_/.exec(schema?.pattern ?? "")?.[1];
  const needsInvocation = parameters.some(({ name }) => name === "inv_id");
  return (prefix === "agt" && needsInvocation && agentOf.get(newest("inv"))) || newest(prefix);
};

const withNewest = (text) => text.replaceAll(ID, (id, prefix) => (exampleIds.has(id) && newest(prefix)) || id);

/** A body with the newest IDs in place of those of the example. An ID that the reader typed stays. */
const filledBody = (operation, body) => {
  const last = filledBodies.get(operation);
  const before = body === last?.after ? last.before : body;
  const after = withNewest(before);
  filledBodies.set(operation, { before, after });
  return after;
};

/** Fills in what is known. What the reader typed into a parameter stays: the page keeps that apart. */
const fillIn = (system, session) => {
  for (const { path, method, operation } of operationsOf(system)) {
    const { parameters = [], requestBody } = operation;
    const fill = ({ name, in: place }, value) => system.specActions.changeParam([path, method], name, place, value);
    for (const parameter of parameters) {
      if (parameter.in === "path") fill(parameter, idFor(parameter, parameters) ?? "");
      if (parameter.name === SESSION_HEADER && session !== undefined) fill(parameter, session);
    }
    const value = requestBody && system.oas3Selectors.requestBodyValue(path, method);
    if (typeof value === "string") system.oas3Actions.setRequestBodyValue({ value, pathMethod: [path, method] });
  }
};

/**
 * The part of the document below `path`, with the schemas in place of their references. The library does so by
 * preparing the whole document for each operation that is opened, which takes more than a second on a busy machine (measured).
 */
const resolveSubtree = async ({ components, ...document }, path, { baseDoc }) => {
  const resolved = (value) => {
    if (Array.isArray(value)) return value.map(resolved);
    if (typeof value !== "object" || value === null) return value;
    const { $ref, ...own } = value;
    const shown = Object.fromEntries(Object.entries(own).map(([key, inner]) => [key, resolved(inner)]));
    if (typeof $ref !== "string") return shown;
    return { ...resolved(components.schemas[$ref.split("/").at(-1)]), ...shown, $$ref: baseDoc + $ref };
  };
  return { spec: resolved(path.reduce((part, key) => part?.[key], { components, ...document })), errors: [] };
};

/** Components of the library, changed so that no control stands within another one and no level of headings is left out. */
const wrapComponents = {
  /** Its link stood within the button of the operation. The address of the page still follows what is opened. */
  OperationSummaryPath:
    (Path, { React }) =>
    (props) =>
      React.createElement(Path, { ...props, operationProps: props.operationProps.set("isDeepLinkingEnabled", false) }),
  operations:
    (Operations, { React: { createElement: element, Fragment } }) =>
    (props) =>
      element(Fragment, null, element("h2", { className: "level" }, "Operations"), element(Operations, props)),
  /** Its dialog offers what can be given to it: a token, and no client certificate. */
  AuthorizeBtnContainer:
    (Button, { React: { createElement: element, Fragment } }) =>
    ({ authSelectors, ...props }) => {
      const isGiven = (definition) => definition.every((scheme) => scheme.get("type") !== "mutualTLS");
      const definitionsToAuthorize = () => authSelectors.definitionsToAuthorize().filter(isGiven);
      const own = { ...props, authSelectors: { ...authSelectors, definitionsToAuthorize } };
      return element(Fragment, null, element("h2", { className: "level" }, "Authorization"), element(Button, own));
    },
  MutualTLSAuth:
    (_, { React: { createElement: element } }) =>
    ({ schema }) =>
      element("div", null, element("h4", null, "Client certificate"), element("p", null, schema.get("description"))),
};

const Helper = {
  fn: { resolveSubtree },
  wrapComponents,
  statePlugins: {
    spec: {
      wrapSelectors: {
        allowTryItOutFor: () => isTryable,
        taggedOperations:
          (original) =>
          (...given) =>
            deletionsLast(original(...given)),
      },
      wrapActions: {
        updateJsonSpec: (original) => (document) => {
          for (const [id] of JSON.stringify(document).matchAll(ID)) exampleIds.add(id);
          return original(document);
        },
        setResponse: (original, system) => (path, method, response) => {
          const result = original(path, method, response);
          if (response.ok) {
            learn(response, method, path);
            fillIn(system, response.headers[SESSION_HEADER.toLowerCase()]);
          }
          return result;
        },
      },
    },
    oas3: {
      wrapActions: {
        setRequestBodyValue:
          (original) =>
          ({ value, pathMethod }) =>
            original({
              value: typeof value === "string" ? filledBody(pathMethod.join(" "), value) : value,
              pathMethod,
            }),
      },
    },
  },
};

const linesAsText = async (response) => {
  const { data, headers } = response;
  if (!headers["content-type"]?.startsWith("application/jsonl")) return response;
  const text = data instanceof Blob ? await data.text() : data;
  return { ...response, data: text, text, headers: { ...headers, "content-type": "text/plain" } };
};

/** Attributes that the library leaves out, by which screen readers tell fields and parts of the page apart. */
const ATTRIBUTES = {
  "#servers": () => ({ "aria-label": "Server" }),
  "#auth-bearer-value": () => ({ "aria-label": "Value: a token" }),
  ".examples-select-element": () => ({ "aria-label": "Example" }),
  ".content-type": () => ({ "aria-label": "Media type" }),
  "textarea.body-param__text": () => ({ "aria-label": "Request body" }),
  "tr[data-param-name] select": (field) => ({ "aria-label": field.closest("tr").dataset.paramName }),
  "input[data-variable]": (field) => ({ "aria-label": field.dataset.variable }),
  ".information-container": () => ({ role: "region", "aria-label": "About this API" }),
  ".scheme-container": () => ({ role: "region", "aria-label": "Server and authorization" }),
  ".responses-table[id]": (table) => ({ "aria-label": `${table.closest(".opblock").id} responses` }),
  ".modal-ux": () => ({ role: "dialog", "aria-modal": "true", "aria-label": "Available authorizations" }),
  ".modal-ux .close-modal": () => ({ "aria-label": "Close" }),
  ".auth-btn-wrapper .btn": (button) => ({ "aria-label": button.textContent }),
  ".auth-container h6": () => ({ "aria-level": "5" }),
};

/** Lets the keyboard scroll what is longer or wider than its box, and pass over the rest. */
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollHeight > target.clientHeight || target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

const nameParts = () => {
  for (const [selector, attributesOf] of Object.entries(ATTRIBUTES)) {
    for (const element of document.querySelectorAll(selector)) {
      for (const [name, value] of Object.entries(attributesOf(element))) element.setAttribute(name, value);
    }
  }
  for (const text of document.querySelectorAll("#swagger-ui pre")) sizes.observe(text);
  keepFocus(document.querySelector(".dialog-ux") !== null);
};

/** What the dialog covers, and the button that has opened it. */
const COVERED = ".information-container, .schemes-server-container, .auth-wrapper > .authorize, #operations";
const OPENERS = ".auth-wrapper > .authorize, .authorization__btn";
const dialog = { isOpen: false, opener: null };
document.addEventListener(
  "click",
  ({ target }) => Object.assign(dialog, { opener: target.closest(OPENERS) ?? dialog.opener }),
  true,
);

/** Keeps the focus within the dialog while it is open, and gives it back to what has opened it. */
const keepFocus = (isOpen) => {
  for (const part of document.querySelectorAll(COVERED)) part.inert = isOpen;
  if (dialog.isOpen && !isOpen) dialog.opener?.focus();
  dialog.isOpen = isOpen;
};
new MutationObserver(nameParts).observe(document.getElementById("swagger-ui"), { childList: true, subtree: true });

SwaggerUIBundle({
  url: "swagger/json",
  dom_id: "#swagger-ui",
  // Keeps the page from sending the document's address to a public validator.
  validatorUrl: null,
  deepLinking: true,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  showCommonExtensions: true,
  // A token stays in the page's memory: the browser's storage would keep it after the page is closed.
  persistAuthorization: false,
  plugins: [Helper],
  responseInterceptor: linesAsText,
});
